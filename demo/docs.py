#!/usr/bin/env python3
"""docs.check: relative links, anchors, and fenced blocks that must parse.

An agent without any library: `agent-reach agents run` starts it once per task. The envelope comes as
JSON on standard input, the result goes as JSON to standard output, and file descriptor 3 takes one
JSON object a line about the task. Exit status 0 is done, 65 means the content can't be parsed.
"""

import argparse
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import time
import urllib.parse

try:
    import tomllib
except ImportError:  # Python before 3.11 reads no TOML: those blocks are counted as unchecked.
    tomllib = None

FENCE = re.compile(r"^\s{0,3}(`{3,}|~{3,})\s*([A-Za-z0-9_+-]*)")
HEADING = re.compile(r"^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$")
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^\"']*[\"'])?\s*\)")
DEFINITION = re.compile(r"^ {0,3}\[[^\]^][^\]]*\]:\s+<?([^\s>]+)>?")
ANCHOR = re.compile(r"<a\s+(?:name|id)=[\"']([^\"']+)[\"']", re.I)
SHELLS = {"sh", "bash", "shell"}


def lines_and_fences(text):
    """Yields (line number, line, None) for prose and (line number, block, language) for a fence."""
    fence, language, start, block = None, "", 0, []
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if fence is None and match:
            fence, language, start, block = match.group(1), match.group(2).lower(), number, []
        elif fence is not None and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            yield start, "\n".join(block), language
            fence = None
        elif fence is not None:
            block.append(line)
        else:
            yield number, line, None


def slug(heading):
    """The anchor that a heading gets on the usual forges."""
    heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    heading = re.sub(r"[`*]|<[^>]*>", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


class Tree:
    """The frozen copy of the repository's text, and the list of every path that it tracks."""

    def __init__(self, root, paths_file):
        self.root = root
        with open(paths_file, encoding="utf-8") as file:
            self.paths = set(file.read().split("\0"))
        for path in list(self.paths):
            while path:
                path = posixpath.dirname(path)
                self.paths.add(path)
        self.known_anchors = {}

    def read(self, path):
        with open(os.path.join(self.root, path), encoding="utf-8", errors="replace") as file:
            return file.read()

    def anchors(self, path):
        """None where the file has no copy here, so that nothing can be said."""
        if path not in self.known_anchors:
            try:
                text = self.read(path)
            except OSError:
                return None
            anchors, seen = set(), {}
            for _, line, language in lines_and_fences(text):
                if language is not None:
                    continue
                anchors.update(ANCHOR.findall(line))
                match = HEADING.match(line)
                if match:
                    name = slug(match.group(2))
                    count = seen.get(name, 0)
                    seen[name] = count + 1
                    anchors.add(f"{name}-{count}" if count else name)
            self.known_anchors[path] = anchors
        return self.known_anchors[path]

    def why_broken(self, source, target):
        """Why a link leads nowhere, or None. Other hosts are not asked: the demo needs no network."""
        if re.match(r"^[a-zA-Z][a-zA-Z0-9+.-]*:", target) or target.startswith("//"):
            return None
        path, _, anchor = target.partition("#")
        path = urllib.parse.unquote(path.split("?")[0])
        if path.startswith("/"):
            path = posixpath.normpath(path.lstrip("/"))
        elif path:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        else:
            path = source
        if path == ".":
            path = ""
        if path.startswith(".."):
            return None
        if path not in self.paths:
            return "no such file"
        if anchor and path.endswith((".md", ".markdown")):
            anchors = self.anchors(path)
            if anchors is not None and urllib.parse.unquote(anchor).lower() not in {a.lower() for a in anchors}:
                return "no such heading"
        return None


def parse_json(block):
    try:
        json.loads(block)
    except ValueError as whole:
        try:
            for line in filter(str.strip, block.splitlines()):
                json.loads(line)
        except ValueError:
            return f"json: {whole.args[0].split(': line')[0]}"
    return None


def parse_shell(block):
    lines = block.splitlines()
    prompts = [line[2:] for line in lines if line.startswith("$ ")]
    text = "\n".join(prompts or lines) + "\n"
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=10)
    if done.returncode == 0:
        return None
    found = re.search(r"line (\d+): (.*?)(?:[`'\"]|$)", done.stderr)
    return f"bash -n: line {found.group(1)}: {found.group(2).strip()}" if found else "bash -n refuses it"


def parse_toml(block):
    try:
        tomllib.loads(block)
    except tomllib.TOMLDecodeError as error:
        return f"toml: {str(error).split(' (at')[0]}"
    return None


PARSERS = {"json": parse_json}
if tomllib is not None:
    PARSERS["toml"] = parse_toml
if shutil.which("bash") is not None:
    PARSERS.update({shell: parse_shell for shell in SHELLS})


def check(tree, path):
    found = {"links": 0, "blocks": 0, "unchecked": 0, "broken": [], "unparsed": []}
    for number, text, language in lines_and_fences(tree.read(path)):
        if language is None:
            prose = re.sub(r"`[^`]*`", "", text)
            for target in LINK.findall(prose) + DEFINITION.findall(prose):
                found["links"] += 1
                why = tree.why_broken(path, target)
                if why:
                    found["broken"].append([number, target, why])
        elif language in PARSERS:
            found["blocks"] += 1
            why = PARSERS[language](text)
            if why:
                found["unparsed"].append([number, why])
        elif language in SHELLS or language == "toml":
            found["unchecked"] += 1
    return found


def note_start(ledger, envelope):
    """One line, one write, to the end of the file: what the final check counts by."""
    if ledger is None:
        return
    payload = envelope["payload"]
    line = {
        "at_ms": int(time.time() * 1000),
        "job": payload["job"],
        "unit": payload["unit"],
        "agent": "docs",
        "pid": os.getpid(),
        "msg_id": envelope["msg_id"],
    }
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def excerpt(text):
    try:
        os.write(3, (json.dumps({"excerpt": text}) + "\n").encode())
    except OSError:
        pass  # Run by hand, there is no descriptor 3.


def result_of(tree, work):
    return {"kind": "docs", "files": {path: check(tree, path) for path in work["files"]}}


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tree", required=True, help="the folder that the paths stand in")
    arguments.add_argument("--paths", required=True, help="a file with every path of the repository, NUL between them")
    arguments.add_argument("--ledger", help="a file that gets one line for each task started")
    arguments.add_argument("--many", action="store_true", help="a bare work a line in, a result a line out")
    options = arguments.parse_args()
    tree = Tree(options.tree, options.paths)
    if options.many:
        for line in sys.stdin:
            print(json.dumps(result_of(tree, json.loads(line))))
        return 0
    try:
        envelope = json.load(sys.stdin)
        work = envelope["payload"]["work"]
        note_start(options.ledger, envelope)
    except (ValueError, KeyError, TypeError) as error:
        print(f"not a task of docs.check: {type(error).__name__}", file=sys.stderr)
        return 65
    result = result_of(tree, work)
    bad = sum(len(found["broken"]) + len(found["unparsed"]) for found in result["files"].values())
    excerpt(f"{len(result['files'])} documents, {bad} findings")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
