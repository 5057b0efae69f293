"""An agent as a Python script: the most frequent words of a text. Run it with

    agent-reach agents run --id keywords --capability text.keywords -- python3 examples/keywords.py
"""

import collections
import json
import os
import re
import sys

envelope = json.load(sys.stdin)
text = envelope["payload"]
if not isinstance(text, str):
    # The last line on standard error becomes the reason; 65 says that the content can't be parsed.
    print("the payload must be a string", file=sys.stderr)
    sys.exit(65)

words = collections.Counter(re.findall(r"\w+", text.lower())).most_common(3)

# File descriptor 3 takes one JSON object a line, for what is said beside the result.
with os.fdopen(3, "w") as beside:
    print(json.dumps({"excerpt": "most frequent: " + words[0][0] if words else "no words"}), file=beside)
    print(json.dumps({"cost": 0.002}), file=beside)

# JSON on standard output is the result.
print(json.dumps([{"word": word, "times": times} for word, times in words]))
