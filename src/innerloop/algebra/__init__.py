"""The two families' chunk forms and what they are made of. No rule is known here."""
