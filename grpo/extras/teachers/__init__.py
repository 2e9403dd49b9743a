"""Who else the policy learns from, besides its rewards: the second and the third part of equation 1 (teaching.py).

module.py has the update, `Taught`. kinds.py has the teachers: each is a choice of conf/teacher.
"""

NEEDS = ("tools",)  # which read conversations in JSON
