.PHONY: check test format

# The quick look before a commit: lint, format, types and the tests that take seconds.
check:
	bash scripts/test.sh -m "not slow and not ray"

# Everything, as continuous integration runs it.
test:
	bash scripts/test.sh

format:
	bash scripts/setup.sh dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
