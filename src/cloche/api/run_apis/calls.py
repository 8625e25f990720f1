"""Code that defines `main`: RAGFlow and FastGPT call it with arguments, and take its value.

A program around the code calls `main`, and leaves the value in a file: `call_program` makes it, `decode_value` reads
what it left. The code is data in it, under the name that tracebacks show.
"""

from __future__ import annotations

import json
from typing import Any

from cloche import errors
from cloche.api.dialect import InvalidJson, decode_json
from cloche.model import Struct

RESULT_FILE = ".result.json"
ARTIFACTS = "artifacts"  # a directory; RAGFlow's programs leave files in it


class CallResult(Struct):
    """The value of `main`, or the message of its error."""

    present: bool = False
    value: Any = None
    message: str = ""


_PYTHON = """\
import inspect, json, linecache, os, sys, types


def finish(**fields):
    with open("/mnt/data/%(file)s", "w") as file:
        json.dump(fields, file)


def call(main, arguments):
    if STYLE == "ragflow":
        return main(**arguments)
    names = inspect.signature(main).parameters
    if len(names) == 1:
        only = next(iter(names))
        return main(arguments[only] if only in arguments else arguments)
    for name, each in names.items():
        if name not in arguments and each.default is each.empty:
            raise TypeError(f"Missing required argument: {name!r}")
    return main(**{name: arguments[name] for name in names if name in arguments})


def helpers(arguments):
    import base64, hashlib, hmac, math, time, urllib.parse, urllib.request

    def count_token(text):
        return math.ceil(len(str(text)) / 4)

    def str_to_base64(text, prefix=""):
        return prefix + base64.b64encode(text.encode()).decode()

    def create_hmac(algorithm, secret):
        timestamp = str(int(time.time() * 1000))
        digest = hmac.new(secret.encode(), f"{timestamp}\\n{secret}".encode(), algorithm).digest()
        return {"timestamp": timestamp, "sign": urllib.parse.quote(base64.b64encode(digest).decode())}

    def delay(ms):
        if ms > 10000:
            raise ValueError("Delay must be <= 10000ms")
        time.sleep(ms / 1000)

    def http_request(url, method="GET", headers=None, body=None, timeout=None, timeout_ms=None):
        headers, data = dict(headers or {}), None
        if body is not None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            headers.setdefault("Content-Type", "application/json")
        asked = urllib.request.Request(url, data, headers, method=method)
        seconds = timeout_ms / 1000 if timeout_ms else timeout or 60
        try:
            reply = urllib.request.urlopen(asked, timeout=seconds)
        except urllib.error.HTTPError as error:
            reply = error
        text = reply.read().decode("utf-8", "replace")
        return {"status": reply.status, "statusText": reply.reason, "headers": dict(reply.headers), "data": text}

    system = types.SimpleNamespace(httpRequest=http_request, http_request=http_request)
    given = dict(
        variables=arguments, SystemHelper=system, system_helper=system, count_token=count_token, delay=delay,
        str_to_base64=str_to_base64, create_hmac=create_hmac, http_request=http_request, json=json, math=math,
        time=time,
    )
    return {**arguments, **given}


STYLE, code, arguments = %(style)r, %(code)r, json.loads(%(arguments)r)
module = types.ModuleType("main")
module.__file__ = "/mnt/data/main.py"
sys.modules["main"] = module
linecache.cache[module.__file__] = (len(code), None, code.splitlines(True), module.__file__)
if STYLE == "ragflow":
    os.makedirs("/mnt/data/%(artifacts)s", exist_ok=True)
else:
    vars(module).update(helpers(arguments))
try:
    exec(compile(code, module.__file__, "exec"), vars(module))
    if not hasattr(module, "main"):
        raise RuntimeError("No 'main' function defined")
    finish(present=True, value=call(module.main, arguments))
except BaseException as error:
    finish(message=str(error) or type(error).__name__)
    raise
"""

_JAVASCRIPT = """\
const fs = require('node:fs');
const Module = require('node:module');

const [style, code, given] = %(call)s;
const values = JSON.parse(given);
const finish = (fields) => fs.writeFileSync('/mnt/data/%(file)s', JSON.stringify(fields));
const fail = (error) => {
  finish({ message: String(error?.message ?? error) });
  console.error('Error when executing main:', error);
  process.exit(1);
};

const countToken = (text) => Math.ceil(String(text).length / 4);
const strToBase64 = (text, prefix = '') => prefix + Buffer.from(text, 'utf8').toString('base64');
const createHmac = (algorithm, secret) => {
  const timestamp = Date.now().toString();
  const hmac = require('node:crypto').createHmac(algorithm, secret).update(timestamp + '\\n' + secret, 'utf8');
  return { timestamp, sign: encodeURIComponent(hmac.digest('base64')) };
};
const delay = (ms) => {
  if (ms > 10000) throw new Error('Delay must be <= 10000ms');
  return new Promise((resolve) => setTimeout(resolve, ms));
};
const httpRequest = async (url, { method = 'GET', headers = {}, body = null, timeout, timeoutMs } = {}) => {
  const type = body === null ? {} : { 'Content-Type': 'application/json' };
  const signal = AbortSignal.timeout(timeoutMs ?? (timeout ?? 60) * 1000);
  const sent = body === null || typeof body === 'string' ? body : JSON.stringify(body);
  const reply = await fetch(url, { method, headers: { ...type, ...headers }, body: sent, signal });
  const { status, statusText } = reply;
  return { status, statusText, headers: Object.fromEntries(reply.headers), data: await reply.text() };
};
const format = (value) => (typeof value === 'object' ? JSON.stringify(value) : String(value));
const write = (...args) => process.stdout.write(args.map(format).join(' ') + '\\n');
const names = ['log', 'info', 'warn', 'error', 'debug', 'trace', 'dir', 'table'];
const scope = {
  require, console: Object.fromEntries(names.map((name) => [name, write])), SystemHelper: { httpRequest },
  countToken, strToBase64, createHmac, delay, httpRequest, variables: values,
};

function findMain() {
  if (style === 'fastgpt') {
    return new Function(...Object.keys(scope), '"use strict";\\n' + code + '\\nreturn main;')(...Object.values(scope));
  }
  const module = new Module('/mnt/data/main.js');
  module.filename = module.id;
  module.paths = Module._nodeModulePaths('/mnt/data');
  fs.mkdirSync('/mnt/data/%(artifacts)s', { recursive: true });
  module._compile(code + '\\n\\nmodule.exports = { main };', module.filename);
  return module.exports.main;
}

(async () => {
  const main = findMain();
  if (typeof main !== 'function') throw new Error('main is not a function');
  let value = await main(values);
  if (value === undefined && style === 'ragflow') {
    throw new Error('main() must return a value. Use null for an empty result.');
  }
  value = value === undefined ? null : value;
  if (JSON.stringify(value) === undefined) throw new Error('main() returned a non-JSON-serializable value.');
  finish({ present: true, value });
  process.exit(0);
})().catch(fail);
"""


def call_program(language: str, style: str, code: str, arguments: dict[str, Any]) -> str:
    """A program in `py` or `js` that calls `main` of `code` as the servers of that style do: ragflow or fastgpt."""
    given = json.dumps(arguments)
    names = {"file": RESULT_FILE, "artifacts": ARTIFACTS}
    if language == "py":
        return _PYTHON % {"style": style, "code": code, "arguments": given, **names}
    return _JAVASCRIPT % {"call": json.dumps([style, code, given]), **names}


def decode_value(files: dict[str, bytes]) -> CallResult:
    """What the program left. A program that ended early, or wrote something else there, has no value."""
    try:
        return decode_json(files[RESULT_FILE], CallResult)
    except (KeyError, InvalidJson, errors.TooLarge):
        return CallResult()
