// For `node --import`: names below localhost are this machine, as with systemd-resolved or nss-myhostname.
import dns from 'node:dns'

const lookup = dns.lookup
dns.lookup = (host, ...rest) => lookup(host.endsWith('.localhost') ? '127.0.0.1' : host, ...rest)
