#!/bin/sh
# An agent as a shell script: counts the words of the payload. The envelope comes in as JSON on standard
# input, standard output is the result, and the exit status 65 says "I can't parse this".
text=$(python3 -c 'import json, sys; sys.stdout.write(json.load(sys.stdin)["payload"])') || exit 65
echo "$text" | wc -w
