"""Verifiers: what a model wrote, judged by written rules; nothing a model wrote is ever evaluated as code."""
