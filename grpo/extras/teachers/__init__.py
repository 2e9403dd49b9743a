"""Who else the policy learns from, besides its rewards: the second and the third part of equation 1 (teaching.py).

Door: a part of the update (training/parts.py), and terms of the algorithm. module.py has the part, `Lessons`. kinds.py has the
teachers: each is a choice of conf/teacher.
"""

NEEDS = ("network", "tools", "vllm_server")  # conversations in JSON; servers that score; their addresses
