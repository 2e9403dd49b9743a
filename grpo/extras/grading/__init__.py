"""Grades mathematical answers: extraction, exact numbers, algebra."""
