"""The platform's own alert rules: what specs leave out of their `alerts` group."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.alert_rule_schemas import AlertRules, AlertRulesBody
from api.auth import least
from api.deps import Database, Who
from api.preconditions import IfMatch, check_if_match, version_etag
from ppo_core.spec import parse_alert_rules
from store import alert_rules

router = APIRouter(prefix="/v1/alert-rules", tags=["alerts"])


@router.get("", openapi_extra=least("viewer"))
def read_alert_rules(database: Database, response: Response) -> AlertRules:
    """The platform's own alert rules, with their ETag."""
    message = AlertRules.model_validate(alert_rules.current_rules(database))
    response.headers["ETag"] = version_etag(message.version)
    return message


@router.put("", openapi_extra=least("admin"))
def replace_alert_rules(
    body: AlertRulesBody, database: Database, who: Who, response: Response, if_match: IfMatch = None
) -> AlertRules:
    """Put other rules in the place of these. Needs If-Match with their ETag; checked as a spec's `alerts` group is.

    They count for specs that are submitted from now on. Runs that are there keep what they were submitted with.
    """
    row = alert_rules.locked_rules(database)
    check_if_match(if_match, version_etag(row.version))
    alert_rules.change_rules(database, row, parse_alert_rules(body.alerts), who.name)
    message = AlertRules.model_validate(row)
    database.commit()
    response.headers["ETag"] = version_etag(message.version)
    return message
