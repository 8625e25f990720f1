'use strict';
// Where a sandbox gets a network while a kernel runs: Node.js looks at these variables as it starts, and not again.

// A cell may have a variable of any of these names, and at its top level that is the global one.
const { process, Set } = globalThis;
const fs = require('fs');

/** Takes them from the environment, which has them by now. What this Node.js cannot do yet, new kernels can. */
function lookAgain(changed) {
  if (changed.NODE_USE_ENV_PROXY) require('http').setGlobalProxyFromEnv?.(process.env);
  if (changed.NODE_EXTRA_CA_CERTS) trust(changed.NODE_EXTRA_CA_CERTS);
}

function trust(path) {
  const tls = require('tls');
  try {
    const known = tls.getCACertificates?.('default') ?? [];
    tls.setDefaultCACertificates?.([...new Set([...known, ...certificates(path)])]);
  } catch {
    // There is no such file, or it holds something else: a connection that needs it says so.
  }
}

const certificates = (path) => fs.readFileSync(path, 'latin1').match(/-----BEGIN CERT[^]*?-----END CERTIFICATE-----/g) ?? [];

module.exports = { lookAgain };
