"""A pytest plugin that is loaded before all others, nbval and so nbformat among them: `-p course.fast_start`.

jsonschema's check of IRIs takes most of the time to import nbformat, a second in each worker; nbformat doesn't use it.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)
