"""This module collects what concerns a schema: its type, how it is drafted, and whether a site's data fit it.

schema = draft("hospital-a.csv", target_column="ill")
schema.save("schema.toml")
check(Schema.load("schema.toml"), frame)        # reasons, or an empty list
"""

from .schema_draft import draft_schema as draft
from .schema_types import Column, Schema
from .site_check import reasons as check

__all__ = ["Column", "Schema", "check", "draft"]
