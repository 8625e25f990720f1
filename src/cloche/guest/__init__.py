"""The code that runs inside a sandbox: standard library and IPython, Python 3.10; of Cloche only `cloche.linux`."""
