"""Weights of policies that come with the package, one `.safetensors` and one `.json` each."""
