"""The map of states as the database's own constraint: a trigger, generated from `store.states.MOVES`.

A migration after a change of the map executes `function_sql()`; a test reads the function back and compares.
"""

from __future__ import annotations

from store.states import MOVES


def function_sql() -> str:
    """A function that refuses a move of `runs.state` which the map does not know."""
    allowed = ",\n        ".join(f"'{source} {target}'" for source in MOVES for target in sorted(MOVES[source]))
    return f"""
CREATE OR REPLACE FUNCTION runs_check_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state || ' ' || NEW.state NOT IN (
        {allowed}
    ) THEN
        RAISE EXCEPTION 'run % cannot go from % to %', OLD.id, OLD.state, NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'runs_move_allowed';
    END IF;
    RETURN NEW;
END $$"""


TRIGGER_SQL = """
CREATE TRIGGER runs_move_allowed BEFORE UPDATE OF state ON runs
FOR EACH ROW WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION runs_check_move()"""
