"""The report of a run: its card, what it recorded, and the page that shows both beside the prediction."""
