"""Who holds how much of a device: `ledger` owns the leases, `reserve` takes several in one step, `reading` is what a
device says, `pressure` how hard it is pressed; the others are what the ledger keeps count with.
"""
