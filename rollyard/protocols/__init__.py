"""Every seam between rooms. A station knows these and the types; it never knows another station.

Methods that touch a device are async: what they do runs elsewhere (a device thread, a child, an actor).
"""
