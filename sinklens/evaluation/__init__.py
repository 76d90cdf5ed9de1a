"""Evaluation: tasks under interventions, records of every sample, and what they say."""
