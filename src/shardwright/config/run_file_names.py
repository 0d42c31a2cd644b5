"""The names of the files and folders that a run writes into its own folder."""

METRICS, BOARD, PROFILE, PICTURE = "metrics.jsonl", "tensorboard", "profile", "experts.svg"
CARD, REPORT = "report.json", "report.html"
TOKENS, CHECKPOINTS_BELOW = "data", "checkpoints"
