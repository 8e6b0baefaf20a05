"""The policy of Mirhoseini et al. 2017: a sequence-to-sequence network that reads groups and writes devices."""
