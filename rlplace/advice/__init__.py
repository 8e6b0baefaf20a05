"""Should a step be placed at all? Quick figures (`advising`), and the rules that judge them (`verdict`)."""
