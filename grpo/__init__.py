import logging

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it where it is, and its import advertises
