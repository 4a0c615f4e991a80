"""Moved to course.answers; here until every topic's tests import it from there."""

from course.answers import answers, definitions
from course.syllabus import SYLLABUS_FILE

MODULE = SYLLABUS_FILE.parent
__all__ = ["MODULE", "answers", "definitions"]
