"""A module that children of these tests cannot import."""

import rollyard.no_such_room  # noqa: F401
