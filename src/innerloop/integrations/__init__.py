"""Faces of our models towards other libraries; each module needs its library, and nothing else imports it."""
