"""A sigmoid of accuracy against compute, fitted to curves of runs: what more compute will give (ScaleRL, arXiv 2510.13786).
Doors: the report, `python eval.py compare=`, and `python -m grpo.predict`."""
