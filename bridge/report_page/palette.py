"""The colours of Okabe and Ito, which colour-blind people can distinguish. No chart relies on colour alone."""

from __future__ import annotations

from typing import Any, Final

BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
YELLOW: Final = "#F0E442"
GREY: Final = "#999999"

SERIES: Final = (BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, YELLOW, GREY)
LIGHT: Final = (SKY, ORANGE, GREEN, YELLOW, PURPLE, VERMILION, GREY)
"""Light enough to contrast with black names."""


def bar_style(colour: str, hatch: str) -> dict[str, Any]:
    """Arguments of matplotlib for a bar of ``colour`` with white hatching."""
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
