"""Reads answers that are no single formula, as pure functions of cleaned text.

kinds.py      words, codes, dates, times, residues, statements: they are compared, never computed
logic.py      formulas of logic and of sets, by their tables of truth
structure.py  lists, sets, tuples, matrices, cases, plus-minus: their parts are compared one by one
"""
