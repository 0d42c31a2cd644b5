"""What is asked for: model, cluster, plan and job, as validated data. No torch here."""
