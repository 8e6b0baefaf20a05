"""Should a step be placed at all? Figures that a minute brings, and the verdict that rules give on them."""
