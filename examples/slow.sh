#!/bin/sh
# An agent to break things with: takes as many seconds as the payload says.
seconds=$(python3 -c 'import json, sys; print(float(json.load(sys.stdin)["payload"]))') || exit 65
sleep "$seconds"
echo "slept $seconds s, attempt $AGENT_REACH_ATTEMPT, resumed $AGENT_REACH_RESUMED"
