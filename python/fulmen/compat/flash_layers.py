# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""flash_attn.layers, of which fulmen answers for one module: rotary."""

__all__: list[str] = []
