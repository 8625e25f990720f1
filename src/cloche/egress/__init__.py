"""The one door of a sandbox: a proxy on the host that lets through what its policy allows, and writes all of it down.

A sandbox has a network namespace of its own with loopback only. Its init binds a listener there and hands it over; this
package accepts on it, on the host. So there is nothing to forward inside, and no process of the sandbox in between.
"""
