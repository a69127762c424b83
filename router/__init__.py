"""The router: admission, cluster view, placement, flights, dispatch, and the front that clients talk to."""
