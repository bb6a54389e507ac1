# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What fulmen is checked and timed with: `fulmen verify`, `fulmen bench` and the tests stand on it.

    cases       named cases, the NumPy oracle and the error rule
    benchmark   cells, the sides that answer them, timing
    naive       attention with the whole score matrix in memory

Nothing but the command line imports it (tools/check_layers.py). The oracle shares no code with the
package, so that one can judge the other.
"""
