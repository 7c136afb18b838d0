"""The documents' own blocks and tasks, in our operators: what several experiments train."""
