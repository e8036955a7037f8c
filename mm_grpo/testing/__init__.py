"""Helpers for tests, ours and users': tiny_models (random models of every family, without a download)."""
