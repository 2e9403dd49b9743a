"""Grades mathematical answers: extraction, exact numbers, algebra."""

NEEDS = ("workers",)  # algebra runs in processes that may be killed
