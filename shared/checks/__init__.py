"""The exercises' checks, one file a topic: `from shared.checks import topic_15_01 as check`."""
