# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What `fulmen bench` is made of: cells (what is asked), sides (who answers), timing, page.

Only ratios of sides within one cell of one run count: clocks and power differ from run to run.
"""
