"""The options of every named workload, one module each, with the sizes `small` and `paper`; none imports torch."""
