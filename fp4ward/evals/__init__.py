"""Evaluation of a model on exact-answer task families."""
