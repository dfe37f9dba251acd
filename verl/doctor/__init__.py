"""Proofs, on a user's own model, chat template and environment server, of what training relies on."""
