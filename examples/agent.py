"""An agent over HTTP, with Python's standard library alone: it counts the words of a text. Run it with

    python3 examples/agent.py [ID] [INBOX_FOLDER]

AGENT_REACH_HTTP names the nodes (default: those of `agent-reach dev`); it moves on when one is gone.
A task is stored in the inbox folder before `received` is said, so it survives the agent's own death.
"""

import json, os, pathlib, sys, threading, time, urllib.error, urllib.request, uuid

NODES = os.environ.get("AGENT_REACH_HTTP", "http://127.0.0.1:7480,http://127.0.0.1:7490,http://127.0.0.1:7500").split(",")
AGENT = sys.argv[1] if len(sys.argv) > 1 else "word_count"
INBOX = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else f"{AGENT}.inbox")
INSTANCE = str(uuid.uuid4())  # names this run: a later one takes its place


def work(payload):
    return {"words": len(payload.split())}


def call(method, path, body=None):
    """The answer's status and JSON. A node that is gone or can't answer now is asked again, or another is."""
    data = None if body is None else json.dumps(body).encode()
    while True:
        try:
            request = urllib.request.Request(NODES[0] + path, data, {"Content-Type": "application/json"}, method=method)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            said = json.load(error)
            if said["code"] == "stale_instance":
                print(f"{AGENT}: {said['message']}", file=sys.stderr)
                os._exit(1)
            if not said["retryable"]:
                return error.code, said
        except (OSError, ValueError):
            NODES.append(NODES.pop(0))
        time.sleep(0.2)


def beat(every):
    while True:  # level 1: the process lives, whatever its loop does
        time.sleep(every)
        call("POST", f"/v1/agents/{AGENT}/heartbeat", {"instance_id": INSTANCE})


def run(task, file):
    path, me = f"/v1/messages/{task['msg_id']}", {"agent_id": AGENT, "instance_id": INSTANCE, "attempt": task["attempt"]}
    status, said = call("POST", path + "/received", me)
    if status == 200:
        try:
            report, more = "/complete", {"result": work(task["envelope"]["payload"])}
        except Exception as error:
            report, more = "/fail", {"reason": "error", "message": type(error).__name__}
        status, said = call("POST", path + report, me | more)
    print(f"{task['msg_id']}: {said.get('state') or said['message']}", flush=True)
    file.unlink()


def main():
    INBOX.mkdir(parents=True, exist_ok=True)
    status, said = call("PUT", f"/v1/agents/{AGENT}", {"instance_id": INSTANCE, "max_concurrency": 1, "capabilities": [{"name": "text.words"}]})
    if status != 200:
        sys.exit(f"{AGENT}: {said['message']}")
    threading.Thread(target=beat, args=[said["heartbeat_ms"] / 1000], daemon=True).start()
    print(f"{AGENT} is registered", flush=True)
    while True:
        for file in sorted(INBOX.glob("*.json")):  # left by an earlier run, or just stored
            run(json.loads(file.read_text()), file)
        status, said = call("GET", f"/v1/agents/{AGENT}/inbox?instance={INSTANCE}&wait=30s")
        for task in said.get("items", []):
            with open(INBOX / "new", "w") as new:
                new.write(json.dumps(task))
                new.flush()
                os.fsync(new.fileno())
            os.replace(INBOX / "new", INBOX / f"{task['msg_id']}.json")


if __name__ == "__main__":
    main()
