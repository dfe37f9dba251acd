"""Models behind an OpenAI-compatible chat endpoint, played by the same collector as models of one's own."""
