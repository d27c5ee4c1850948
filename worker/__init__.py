"""Claims runs, supervises them, brings journals to Postgres and commands to trainers. No maths, no web."""
