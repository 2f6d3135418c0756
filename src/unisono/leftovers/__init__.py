"""What has forward left behind in the replicas, and in what they share?"""
