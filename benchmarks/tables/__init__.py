"""The generated tables of README.md and docs/, by what they are about; make_tables.py writes them."""
