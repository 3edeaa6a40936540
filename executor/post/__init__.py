"""Postprocess workers: text and stop strings made outside the frontend's process."""
