"""What served before paging did: contiguous memory for each sequence. Simulated, to compare with.

The policies are those that the PagedAttention paper (Kwon et al., SOSP 2023, section 6.1) gives the
systems it compares with.
"""
