"""English text that every Python carries, for machines that have no other."""

from __future__ import annotations


def pydoc_topics() -> str:
    """Return the topics of Python's own help, in alphabetical order, as one text."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))
