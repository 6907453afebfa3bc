"""The 24-points card game that the experiments 7-11 share: hands and rules, prompts, grading, environment, corpus."""
