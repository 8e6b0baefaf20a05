"""Should a step be placed at all? Figures that a minute brings (`advising`), and the rules that judge them (`verdict`)."""
